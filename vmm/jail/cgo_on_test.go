//go:build cgo

package jail

const withCgo = true
