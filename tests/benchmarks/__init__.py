"""What aioprefetch costs, beside what others cost: ``python -m tests.benchmarks --help``.

__main__   which workloads, how many repeats; writes the JSON
runner     interleaves the contenders: A B C A B C …, each in a process of its own
one        that process: one workload, one contender, one repeat
workloads  what is measured, a file a subject
contenders how each is told to do it, a file a peer
data       the datasets
meter      clocks, processor time, memory
results    the JSON, read again: medians, ratios, goals
report     docs/benchmarks.md and its plots, made from the JSON
"""
