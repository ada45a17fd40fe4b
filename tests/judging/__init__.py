"""Programs that were written elsewhere, judged: right ones pass, wrong ones fail with the reason."""
