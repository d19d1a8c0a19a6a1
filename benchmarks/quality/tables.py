def write_summary(*a): pass
