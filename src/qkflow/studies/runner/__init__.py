"""Execution of the runs of a study.

engines     where runs are executed: local processes or Ray; a new engine goes here
fork_server a process that has imported the worker and forks one child per run
execution   the queue: which run is started when, and its state
live        the table on the terminal
study_dir   the files of a study and of its runs
"""
