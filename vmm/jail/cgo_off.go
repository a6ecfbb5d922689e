//go:build !cgo

package jail

// builtWithCgo: the runtime makes all threads of this program itself.
const builtWithCgo = false
