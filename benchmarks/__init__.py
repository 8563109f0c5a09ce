"""Timing and pictures for `dsparkgen bench`; recorded runs are in results/."""
