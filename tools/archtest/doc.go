// Package archtest holds the tests that keep the code's shape: who may import whom, that every package says what it is for, and
// where the fine print is (unsafe, sizes). It has no code of its own. Run it with -count=1: the go tool does not see that files
// elsewhere changed.
package archtest
