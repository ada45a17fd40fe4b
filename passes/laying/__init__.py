"""How tensors lie and what is summed: from a plan and a batch to all that ranks will do."""
