//go:build cgo

package jail

// builtWithCgo: the C library may make the threads of this program.
const builtWithCgo = true
