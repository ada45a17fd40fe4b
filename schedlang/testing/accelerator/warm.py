"""Imported before ranks are forked, so that they have the device registered."""

from schedlang.testing.accelerator.device import registered

registered()
