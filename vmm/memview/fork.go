package memview

// fork clones the process, without the runtime noticing: the child has nothing of it. It returns the child's process id, or the
// negative error number. shared is the address of the shared memory, request and response are the child's ends of the pipes.
//
//go:noescape
func fork(shared, request, response uintptr) (pid int)
