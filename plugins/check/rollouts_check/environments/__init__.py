"""The checks of environments.

table       all checks, in their order
subject     the environment that is checked, its tasks and its demonstrations
agents      scripted agents that play episodes through the engine's own code
traces      what an episode leaves behind: threads, processes, files, random numbers
package     the wheel and the import, in processes of their own
definition  the class and its settings
tasks       tasks and demonstrations
tools       schemas, and arguments that no author expects
rewards     an expert, an idle agent and an echo; what a reward returns
answers     whether the prompt, a schema or a result shows the answer
forger      agents that try to earn a reward without solving the task
lifecycle   cancellation, deadlines, `close`, `state` and `restore`, several episodes at once
through_worker  the same environment in a worker
tokens      token masks under several chat templates
child       the program that draws tasks in another process
"""
