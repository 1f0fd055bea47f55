"""Generation of many rollouts, from user functions to whole training steps.

groups metrics       all rollouts of one prompt: group rewards, filters, samples; metrics
failures pool        retries and the limit on failures; concurrent episodes that can pause and resume
steps live           the manager's configuration and results; an unfinished group, and its part of a checkpoint
user_functions       your own generate_fn, reward_fn or filter_fn
manager              AsyncRolloutManager: the groups of a step, and prefetched steps
rollout_generation   batches from a generate_fn, without a manager
"""
