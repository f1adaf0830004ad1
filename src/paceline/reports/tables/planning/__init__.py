"""Tables of the planner: layouts, budgets, and the accuracy of its predictions."""
