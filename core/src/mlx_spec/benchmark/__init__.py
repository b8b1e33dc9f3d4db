"""The method behind `spec bench`: alternating runs of a loaded pair, medians beside every raw run.

workloads   bundled texts, one fresh prompt per trial
method      warm-up, alternation, clocks, confirmation of the path that ran
statistics  medians, paired ratios, first difference of two replies
machine     what the figures belong to: machine, versions, files
report      the JSON document, the tables, writing files in one step
plot        one picture of medians and spread
"""
