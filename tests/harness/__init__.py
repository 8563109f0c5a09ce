"""What tests, `dsparkgen verify` and the benchmarks share: cases, the oracle, and the engine's loop as a baseline."""
