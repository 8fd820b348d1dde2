"""Real networks that Penstock ships, to run, to measure and to test with.

Nothing is registered here and nothing is imported: `penstock.model` names a network as
``penstock.models.<module>:<function>`` and loads the module when a job asks for it. Such a function
takes keyword numbers only and returns an untrained ``torch.nn.Module`` that says how many channels
it takes and gives as ``in_channels`` and ``out_channels``. Weights lie beside the modules as
safetensors.
"""
