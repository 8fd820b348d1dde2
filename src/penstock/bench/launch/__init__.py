"""A fresh process for each launch, and sweeps of them."""
