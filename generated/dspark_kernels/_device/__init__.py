"""Hand-written device code and host code that the kernels of all models share."""
