"""The planner: what a policy needs and costs, before anything is allocated. It imports no torch."""
