package hostvm

import (
	"cmp"
	"os"
)

// ForTests answers the name of the emulated host that tests and benchmarks use, and where its API shows up on this machine:
// "test" and port 3100 of loopback, or as TORPOR_TEST_INSTANCE and TORPOR_TEST_PORT say, so that two runs can go side by side.
func ForTests() (instance, listen string) {
	return cmp.Or(os.Getenv("TORPOR_TEST_INSTANCE"), "test"), "127.0.0.1:" + cmp.Or(os.Getenv("TORPOR_TEST_PORT"), "3100")
}
