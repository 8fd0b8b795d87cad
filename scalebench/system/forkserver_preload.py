"""First module imported by the forkserver process, which then ends with its parent even while it imports torch."""

from scalebench.system.parent_watch import end_with_parent

end_with_parent()
