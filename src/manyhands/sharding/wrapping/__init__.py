"""Which modules of a model get a wrapper of their own. Knows nothing of how wrappers work.

_wrap.py      enable_wrap, wrap, auto_wrap, auto_wrap_bn: the options, and changing the model
_policies.py  what a policy is, the two that are built in, and the modules that one picks
"""
