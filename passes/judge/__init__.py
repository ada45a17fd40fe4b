"""Programs that were written elsewhere, judged by the comparator that judges our own."""
