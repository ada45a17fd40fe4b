"""All that is known of a plan with a batch before there are ranks: what lies where, and when."""
