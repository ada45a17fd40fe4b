"""Search for the schedule that trains a model fastest on a cluster, within its memory."""
