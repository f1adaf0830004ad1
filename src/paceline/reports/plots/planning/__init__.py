"""Pictures of what is planned: layouts, budgets, and how well they were predicted."""
