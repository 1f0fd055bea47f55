"""The checks of every kind but environments.

table      the checks of each kind, in their order; the other parts of an algorithm
common     the component with its settings; checks of every kind: import, wheel, signature, settings; of functions:
           changed inputs, repeated calls
tokens     functions of tokens: losses, KL estimators, corrections; invented tokens, and derivatives of them
groups     functions of one group: advantages, mixers, shapings, selectors, pairings; advantages of a batch
weights    aggregations
rewards    rewards, and invented episodes
filters    filters
samplers   task samplers and curricula
datasets   dataset loaders
updates    references and optimizers
trainers   training backends
loggers    loggers
tools      tools and tool parsers
sandboxes  sandboxes
workers    workers
engines    inference backends
programs   commands and hooks
"""
