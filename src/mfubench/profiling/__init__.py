"""A profiled step taken apart: the trace that is kept, what each kernel is for, and where the step's time went."""
