"""Validation of the planner: held-out errors on published runs, and regret."""
