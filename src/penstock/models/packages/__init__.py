"""Networks as others leave them: a folder or a zip file, opened as a module and a recipe.

    bioimageio       rdf.yaml or bioimageio.yaml                 a bioimage.io package
    nnunet           plans.json, dataset.json, fold_0/           an nnU-Net v2 training
    monai_bundle     configs/metadata.json, models/model.pt      a MONAI bundle
    onnx             NAME.onnx                                   an ONNX file

Each room has one function, ``read``, which takes a `Parcel` and gives a `Package`.
"""
