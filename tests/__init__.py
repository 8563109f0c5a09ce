"""Tests, and the harness that `dsparkgen verify` and `bench` share with them."""
