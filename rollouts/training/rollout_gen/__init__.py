"""Many rollouts at once, from the users' functions at the bottom to whole steps.

groups metrics       all rollouts of one prompt: rewards that see them all, filters, samples; what is counted
failures pool        which episodes are retried, and how many may fail; episodes side by side, paused and resumed
steps live           what the manager is given and gives; a group on its way, and what a checkpoint keeps of it
user_functions       a generate_fn, reward_fn or filter_fn of one's own
manager              AsyncRolloutManager: a step's groups, while the next ones may be prefetched
rollout_generation   batches from a generate_fn without a manager
"""
