"""Tests of refusals: every error code is produced exactly as its documentation page shows it."""
