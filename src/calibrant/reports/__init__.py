"""Pictures and pages from figures: what to show of a model, once it has been measured."""
