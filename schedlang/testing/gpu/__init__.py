"""The examination of a GPU by one command: python -m schedlang.testing.gpu

Kernels, programs, ranks, compiled regions and offloading are compared with plain torch on the same
device; then kernels and layers of Llama are timed. The results are written as a page.
"""
