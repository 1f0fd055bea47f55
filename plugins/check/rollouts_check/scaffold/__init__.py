"""Packages to begin with: `rollouts new KIND NAME`.

`packages` renders the files of a package from `templates/`: a folder for each kind of component, and `shared/`. The
templates end in `.txt`, so that no tool reads them as code of this library.
"""
