"""Who takes part in each benchmark: a function `contestants(options)` in each module."""
