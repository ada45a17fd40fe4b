"""All that a GPU has to show, by one command: python -m schedlang.testing.gpu

Kernels, programs, ranks, compiled regions and offloading are compared with plain torch on the same
device; then kernels and layers of Llama are timed.  What was found is written as a page.
"""
