// Package snapcache keeps snapshots: directories with a manifest.json that names, sizes and checksums every file.
//
// A directory without a whole manifest is no snapshot, whatever else is in it. A snapshot is made in a directory beside its
// place ("<name>.tmp") and published by one rename after everything in it is on the disk; it is unmade by removing its manifest
// first. So at every instant of a crash the old or the new state is there, whole, and Sweep removes what is neither.
// A published snapshot never changes and its name is never used again.
//
// The package knows files and checksums, not what is in them.
package snapcache
