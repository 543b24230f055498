/* Whether a mapped file with weights was cut. See mappings.c. */
#ifndef FLEETFOOT_MAPPINGS_H
#define FLEETFOOT_MAPPINGS_H

__attribute__((visibility("default"))) int ff_file_was_cut(void);

#endif
