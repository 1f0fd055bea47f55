"""`rollouts view`: runs in a browser, from a curve down to one token. `rollouts runs`: runs in a terminal.

| module | what it does |
|---|---|
| `server` | serves the page and the API on this machine alone, to the browser that has the link |
| `api` | the paths of the API |
| `catalog` | which runs there are, and what their folders say |
| `table` `filters` | the trajectories of a step as a table; which rows an expression keeps |
| `rollout` | one trajectory with its tokens |
| `health` | where the time of a run goes, what its engine served, why rollouts failed or were not trained |
| `settings_api` `drafts` | the form of a new run: what it asks, and how its text becomes settings |
| `component_reader` `settings_files` | the components that the form shows; files below the opened directories |
| `data_api` `data_rows` | training data: what its page asks, and its rows |
| `export` | one file to send to somebody |
| `listing` `comparing` `cleaning` | the runs in a directory; what differs between them; what can be removed |
| `command` `runs_command` | the two commands |
| `page/` | HTML, CSS and JavaScript, as the browser loads them |

Not here: what a run writes (`rollouts.runs`). Nothing in this package starts a run. A run's tags and its note can be
changed, and `cleaning` removes files. Else it writes only the settings files that the user names.
"""
