/* Names of exported functions. Each kernel file is compiled once per instruction set, under another prefix each time. */
#ifndef FLEETFOOT_VARIANT_H
#define FLEETFOOT_VARIANT_H

#ifndef FF_VARIANT
#define FF_VARIANT generic
#endif

#define FF_JOIN_(variant, name) ff_##variant##_##name
#define FF_JOIN(variant, name) FF_JOIN_(variant, name)
#define EXPORT(name) __attribute__((visibility("default"))) FF_JOIN(FF_VARIANT, name)

/* Return values of exported functions. */
enum { FF_OK = 0, FF_NO_MEMORY = 1, FF_BAD_METADATA = 2, FF_CUT_FILE = 3 };

#endif
