"""The checks of environments.

table       all checks, in their order
subject     the environment that is checked, its tasks and its demonstrations
agents      scripted agents that play episodes through the engine's own code
traces      what an episode leaves behind: threads, processes, files, random numbers; what runs in another process
definition  the import and the wheel, the class and its settings, tasks and demonstrations
tools       schemas, arguments that no author expects, and token masks under several chat templates
rewards     an expert, an idle agent and an echo; what a reward returns
answers     whether the prompt, a schema or a result shows the answer
forger      agents that try to earn a reward without solving the task
lifecycle   cancellation, deadlines, `close`, `state` and `restore`, several episodes at once
processes   the same episodes in another process and in a worker; what an episode changes in the process
child       the programs that run in another process
"""
