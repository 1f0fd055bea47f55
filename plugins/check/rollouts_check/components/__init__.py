"""The checks of every kind but environments.

table          the checks of each kind, in their order
subject        the component that is checked, with its settings
common         checks of every kind: import, wheel, signature, settings; of functions: changed inputs, repeated calls
token_inputs   invented tokens: what losses and their like may name
tokens         functions of tokens: losses, KL estimators, corrections
stop_gradient  derivatives by finite differences that keep detached values as they are
groups         functions of one group: advantages, mixers, shapings, selectors, pairings; advantages of a batch
weights        aggregations
parts          the other parts of an algorithm
episodes       invented episodes
rewards        rewards
filters        filters
samplers       task samplers and curricula
datasets       dataset loaders
updates        references and optimizers
trainers       training backends
loggers        loggers
tools          tools and tool parsers
sandboxes      sandboxes
workers        workers
engines        inference backends
programs       commands and hooks
"""
