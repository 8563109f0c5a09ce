"""dsparkgen: from a model's spec file to specialised draft-sampling kernels."""

__version__ = "0.1.0"
