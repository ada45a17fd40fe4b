"""Programs that were written elsewhere: right ones pass, wrong ones fail with the reason."""
