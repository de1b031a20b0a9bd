"""What the scheduler is compared with: a lower bound, other ways to share GPUs, a trace; and tasks as the loop has them."""
