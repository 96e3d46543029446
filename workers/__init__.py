"""Workers, which run the nodes of a graph: engines, executors, environments, rewards and data.

Nothing here knows an algorithm, a configuration file or the command line.
"""
