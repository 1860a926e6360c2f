"""Tables, plots and HTML pages of evaluations and comparisons."""
