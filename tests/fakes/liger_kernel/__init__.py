"""A stand-in for the package liger_kernel, for tests on a CPU."""
