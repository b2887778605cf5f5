"""The rollout service: tasks in by HTTP, judged sessions out."""
