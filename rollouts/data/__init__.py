"""Rows of data: from files, hubs and packages.

loaders         the loaders of the core: one function for each format
source          what `--data` names: its loader, its settings, its rows with their places
conversations   rows as conversations, with weights, and messages in the words of any API; pure functions
"""
