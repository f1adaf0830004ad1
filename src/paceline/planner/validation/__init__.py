"""How accurate the plan is: held-out errors of published runs, regret."""
