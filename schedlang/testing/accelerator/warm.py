"""Imported before ranks are forked: they find the device registered."""

from schedlang.testing.accelerator.device import registered

registered()
