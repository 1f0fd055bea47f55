"""A filter of groups."""


def enough_judged(rewards, *, judged_min: int = 1):
    """Drop groups of which too few rollouts could be judged.

    Args:
        judged_min: as many must have been
    """
    judged = sum(reward is not None for reward in rewards)
    return True if judged >= judged_min else "too_few_judged"
